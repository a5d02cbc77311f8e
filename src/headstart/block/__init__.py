"""What a block is: its key, its representation, and how a run of blocks is laid down as an extent. Pure: no I/O, no clock."""
