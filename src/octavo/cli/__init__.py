"""The command `octavo`: one module per subcommand, each with `add_parser(subparsers)` and `run(args)`.

Nothing here imports torch or rich before a subcommand needs it: `octavo --help` must answer at once.
"""
