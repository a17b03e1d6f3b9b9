"""What it costs: times, results, statistics, and the machine that they were taken on."""
