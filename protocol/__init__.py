"""The Kafka wire protocol: message layouts, codecs and error codes.

Decode a request from a frame (the bytes after the 4-byte size), and encode its response (with
the size in front):

    header = read_header(frame)                     # codec: (api_key, api_version, correlation_id,
                                                    #         client_id, body_position)
    request = decode_body(header, frame)            # a MetadataRequest, JoinGroupRequest, ...
    response = MetadataResponse(brokers=[MetadataResponseBroker(node_id=1, ...)])
    encode_response(header.api_key, header.api_version, header.correlation_id, response)  # bytes

`protocol.messages` has one class for each structure, the same for all versions: `<Api>Request`,
`<Api>Response`, and for a part that name followed by the name of the part
(`MetadataResponseTopic`). Fields have Kafka's names in snake_case. Arrays are lists, strings are
str, bytes and records are bytes, uuids are 16 bytes (zeros for none), null is None, and error codes
are ints. Constructors take keywords; an omitted field gets the default of the protocol, an omitted
array a new list. A field that a version does not have gets its default when decoded and is not
encoded. The classes have slots, because type checkers know them (`messages.pyi`) and they cost the
same as dicts in CPython 3.11.

Produce and Fetch use the hand-written codecs in `produce_codec.py` and `fetch_codec.py`, which copy
no records; their tables serve our clients and the tests. Invalid bytes of a peer always raise
ProtocolError.
"""
