"""Data planes: how bytes are moved and summed. ``base`` is the contract, ``mpi`` and ``local`` keep it."""
