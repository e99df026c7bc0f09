"""How a sample is made of a corpus's tokens: masking, packing, chats, span corruption."""
