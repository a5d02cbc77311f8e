"""Transformers under the store: a `Cache` for `model.generate(…)` whose beginning comes from disk and whose end goes there.

    store = open_store(model)
    with store.cache(inputs["input_ids"]) as cache:
        output = model.generate(**inputs, cache=cache)
    store.close()

In older versions of transformers the argument is called `past_key_values`. It is the store that `headstart serve` has: what
either keeps of a model with plain attention, the other finds.
"""

from headstart.connect.transformers.cache import HeadstartCache
from headstart.connect.transformers.store import Store, open_store

__all__ = ["HeadstartCache", "Store", "open_store"]
