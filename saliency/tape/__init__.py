"""The operations of one forward on a tape, played again behind a layer or where a change of the picture reaches."""
