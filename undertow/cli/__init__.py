"""The command `undertow`, one file per subcommand."""
