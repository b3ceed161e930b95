"""What maintainers run: the ledger of records, the GPU report, the benchmark of loading and step, the race."""
