"""Parts of messages: loggers, counts in sentences, words of other tools."""
