"""The web page of `stormtorch watch`: its server, its files, and who may look."""
