"""Chats: records of messages, the templates that write them, tokens told whether they count."""
