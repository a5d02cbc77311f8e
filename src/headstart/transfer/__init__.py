"""How bytes move: worker threads over a tier, staging memory, and the load of a prompt layer by layer."""
