"""The Kafka wire protocol: layouts, codecs, error codes. It knows bytes, not what they are for.

How it is used, from a frame (what follows the 4-byte size) to an answer (size included):

    header = read_header(frame)                     # codec: (api_key, api_version, correlation_id,
                                                    #         client_id, body_position)
    request = decode_body(header, frame)            # a MetadataRequest, JoinGroupRequest, ...
    response = MetadataResponse(brokers=[MetadataResponseBroker(node_id=1, ...)])
    encode_response(header.api_key, header.api_version, header.correlation_id, response)  # bytes

Bodies are slotted classes made from the tables, one per structure and the same for all versions:
`protocol.messages`, named `<Api>Request`, `<Api>Response` and, for a part, that name plus
the part's (`MetadataResponseTopic`). Fields are Kafka's in snake_case. Arrays are lists, strings
str, bytes and records bytes, uuids 16 bytes (zeros for none), null is None, error codes plain ints.
Constructors take keywords; what is left out has the protocol's default, a list is new and empty.
What a version does not carry has its default after decoding, and is not written by encoding. Slots
were chosen over dicts because type checkers see them (`messages.pyi`) and, in CPython 3.11, reading
and filling them costs the same.

Produce and Fetch go through `produce_codec.py` and `fetch_codec.py`, written by hand, which copy no
records; their tables serve clients and tests. Bytes of a peer raise ProtocolError and nothing else.
"""
