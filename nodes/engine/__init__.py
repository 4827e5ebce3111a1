"""What happens between a graph's widgets and a kernel: plan, layer identity, override, ledger."""
