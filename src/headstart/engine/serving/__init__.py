"""What every engine of ours does alike with requests: take them in, order them, let them in, let them give way, end them.

An engine brings its own KV memory, passes and sampling and says here what it has, by subclasses and the protocols in `parts`.
Nothing here imports a tensor library.
"""
