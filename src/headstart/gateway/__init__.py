"""Many workers behind one address: who they are, what each holds, where a request goes, and what becomes of it there.

    app         HTTP: the dialects, the admin API; what a server of ours has, with workers in place of an engine
    router      all that it has: workers, prompts, accounts, who gave which answer
    bodies      what is read of a body and put into it; passing: a stream on its way to the client
    forward     one request: sent, watched, sent elsewhere where nothing was answered yet, passed on as it comes
    sending     where and how a request is sent: the one place that another way of sending replaces
    apart       a prompt computed by one worker, and answered by another
    prompts     a request's tokens, and the keys of its blocks
    fleet       the workers: how each is, by asking it; what each holds, by its events
    following   KV events, one thread for all workers
    answers     what an answer says of itself as it passes: usage, first token, how it ended
    decisions   which worker and why, for whoever asks later

    cluster     all of it from one file: router and workers kept running, the planner, the end
    launching   what starts and ends workers: local processes, Ray
    planning    the planner at work, through the router and a launcher

Nothing here has to survive a restart. What is decided is decided by `policy.routing`.
"""
