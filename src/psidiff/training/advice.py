"""What a person can do about the damaged files of a run."""

DAMAGED_CHECKPOINT = (
    "copy the checkpoint again from where it came, or go on from the one before it with "
    "--resume --skip-damaged"
)
DAMAGED_LOG = (
    "delete the file, and the run goes on without its past, or keep the lines that are whole "
    "with --resume --skip-damaged"
)
