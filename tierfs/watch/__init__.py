"""What others are told of an instance while it runs: events, carried to a log, a command or a webhook. Nothing here
decides anything about steps, and nothing waits for it."""
