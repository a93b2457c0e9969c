"""Training of real models over networks that lose, policies side by side: `stormtorch train`."""
