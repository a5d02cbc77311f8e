"""A fleet on a virtual clock: traces through the router's own code, with engines that are a few numbers.

trace    what is asked: Mooncake's format, agent sessions, one hot prefix
worker   an engine: prefill in chunks beside decoding, memory, what it keeps; in sums, not step by step
fleet    workers, a pool and a rule, event by event
result   first token, time per token, hit rate by tier, utilisation
"""
