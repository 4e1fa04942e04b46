"""Modules that only Horovod has. The finder runs each file under its Horovod name; nothing imports them from here."""
