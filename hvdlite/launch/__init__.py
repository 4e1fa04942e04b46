"""hvdrun: starts the ranks of a job with the MPI's own starter, watches over them, and ends them together.

The life of a job::

    hvdrun ---- starts ----> the MPI's starter (Hydra, PRRTE, orterun) ---- starts ----> guards, one per rank
      |                                                                                    |
      `--- private local socket: job (argv, environment, directory), signals, reports -----+---- rank

Everything the user gave travels over the socket as data, so no starter can reinterpret it and nothing of it
shows in a list of processes. Standard library only: the launcher never loads NumPy, mpi4py or a framework.
"""
