"""What messages are made of: loggers, counts in sentences, words of other tools."""
