"""What the source articles claim, and what stored rows or arithmetic say to it.

`claims.toml` states every claim with its test; `judging` applies the tests to rows. Nothing here imports a
kernel but `figures`, which does the arithmetic, `triage`, which asks `diagnose`, and `cli`.
"""
