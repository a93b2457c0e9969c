"""How a rank enters a job: rendezvous, start, late entry, restart, and questions from outside."""
