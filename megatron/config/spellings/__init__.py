"""Tables of the flags of other Megatrons, by the kind of answer that each gets."""
