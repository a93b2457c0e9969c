"""The web page of `stormtorch watch`: its server, its files and its access control."""
