"""Kinds of messages that the first of several ranks sends the others, its first number each (`following.py`)."""

# The end; blocks and states that are copied; a step, the step after it, the last states of a text; an adapter; and of
# the prefix cache on disk: its secret, blocks to write, to record as used and to read; whether they are read, and if so
# what is taken; that nobody waits for them.
END, COPY, COPY_STATES, STEP, NEXT, STATES, ADAPTER, SECRET, KEEP, TOUCH, SEEK, TAKE, DROP = range(13)
