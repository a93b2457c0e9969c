"""Links between a lab's hosts: kernel bridges and shapers, a relay process, a cable, NAT routers, further paths."""
