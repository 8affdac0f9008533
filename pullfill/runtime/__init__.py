"""What every process has: log, metrics, probes, its way to end, threads, timers, memory."""
