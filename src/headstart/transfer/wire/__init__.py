"""KV of a prompt from one process straight to another: from the worker that computes it to the one that goes on with it."""
