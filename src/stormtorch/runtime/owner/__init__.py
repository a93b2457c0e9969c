"""Owner policies on real ranks: gradients reduced to owners, parameters broadcast from them."""
