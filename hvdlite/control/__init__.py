"""Control planes: how ranks agree. ``base`` is the contract, ``mpi`` and ``local`` keep it."""
