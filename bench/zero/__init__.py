"""Every ZeRO stage beside the frameworks that serve it: seconds, memory and bytes."""
