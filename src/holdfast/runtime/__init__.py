"""What holdfast needs of its process: clock, log, telemetry, exit, and how each flavour waits."""
