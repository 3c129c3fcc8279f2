"""Which kernel and constants: `recommend` answers from stored rows, `tune` searches on a GPU."""
