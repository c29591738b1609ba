"""How everything here is measured: processes, interleaved rounds, medians, the machine beside them, JSON, pictures."""
