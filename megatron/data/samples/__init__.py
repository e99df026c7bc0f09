"""Makes samples from the tokens of a corpus: masking, packing, chats, span corruption."""
