"""The family: one short file per member, and the table of all of them."""
