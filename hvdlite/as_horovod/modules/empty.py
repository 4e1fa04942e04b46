"""A package of Horovod's of which only submodules are offered."""
