"""When requests come and how long they are: arrival processes, lengths, trace files."""
