"""The timeline: recording (``recorder``), reading rings (``ring``), Chrome JSON (``export``, ``live``)."""
