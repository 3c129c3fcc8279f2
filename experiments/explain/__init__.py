"""One run of a kernel on the CPU machine, explained by call site."""
