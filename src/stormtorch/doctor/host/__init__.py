"""Checks of this machine alone, without any other host: kernel, memory, clock, versions, network interfaces."""
