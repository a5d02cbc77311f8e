"""Which worker gets a request: what each holds, how long it would take there, what that does to the others. Pure.

    holders     which worker holds which blocks, bounded, approximately
    estimate    first token and work on each worker, and the choice
    spread      prefixes that everybody asks for, on several workers
    router      these together: all that a router knows, fed by what happens
    baselines   other rules, to compare with

Time and randomness are passed in, so the simulator runs the very code that the router runs.
"""
