"""`python -m experiments`."""

if __name__ == "__main__":  # a worker imports this module too, and needs nothing of it
    from experiments.interrupts import leave_at_once

    leave_at_once()
    from experiments.cli import main

    main()
