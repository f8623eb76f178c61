"""What a run came to, said for people: on a terminal, and what they should look at."""
