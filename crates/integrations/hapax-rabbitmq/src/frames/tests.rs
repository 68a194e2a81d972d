use super::*;

fn frame(kind: u8, payload: &[u8]) -> Vec<u8> {
    let mut frame = vec![kind, 0, 1];
    frame.extend(u32::try_from(payload.len()).unwrap().to_be_bytes());
    frame.extend(payload);
    frame.push(0xce);
    frame
}

fn short_string(text: &[u8]) -> Vec<u8> {
    [&[u8::try_from(text.len()).unwrap()], text].concat()
}

/// Properties with headers, and with a message id.
fn properties(headers: &[u8], id: Option<&[u8]>) -> Vec<u8> {
    let flags: u16 = if id.is_some() { 0x2080 } else { 0x2000 };
    let mut payload = [&[0, 60, 0, 0, 0, 0, 0, 0, 0, 0, 0, 5], &flags.to_be_bytes()[..]].concat();
    payload.extend(u32::try_from(headers.len()).unwrap().to_be_bytes());
    payload.extend(headers);
    payload.extend(id.map(short_string).unwrap_or_default());
    payload
}

fn nested(depth: u32, kind: u8) -> Vec<u8> {
    let mut value = vec![b'V'];
    for _ in 1..depth {
        let name = if kind == b'F' { short_string(b"n") } else { Vec::new() };
        let content = [name, value].concat();
        let length = u32::try_from(content.len()).unwrap().to_be_bytes();
        value = [&[kind], &length[..], &content].concat();
    }
    [short_string(b"h"), value].concat()
}

/// Repairs bytes that arrive in parts of every size up to 9, which gives the same each time, and restores them in such parts.
fn restored(bytes: &[u8]) -> Vec<u8> {
    let (mut whole, mut restored) = (Vec::new(), Vec::new());
    FrameRepair::new(None).repair(bytes, &mut whole).unwrap();
    FrameRestore::new().restore(&whole, &mut restored).unwrap();
    for size in 1..10 {
        let (mut frames, mut found) = (FrameRepair::new(None), Vec::new());
        for part in bytes.chunks(size) {
            frames.repair(part, &mut found).unwrap();
        }
        assert_eq!(found, whole, "in parts of {size} bytes");
        let (mut frames, mut found) = (FrameRestore::new(), Vec::new());
        for part in whole.chunks(size) {
            frames.restore(part, &mut found).unwrap();
        }
        assert_eq!(found, restored, "in parts of {size} bytes");
    }
    restored
}

/// Bytes of a content header before its properties.
const PROPERTIES_AT: usize = FLAGS_AT + FLAGS;

/// Returns the frame of a content header whose properties are repaired.
fn repaired(content_header: &[u8]) -> Vec<u8> {
    let mut found = Vec::new();
    let encoded = &content_header[HEADER + FLAGS_AT..content_header.len() - 1];
    append_content_header(content_header, &repaired_properties(encoded), &mut found);
    found
}

#[test]
fn frames_that_are_correct_stay_as_they_are() {
    let every_type = [
        &b"\x01vV\x01tt\x01\x02uibx\x01BB\x01\x01ss\x01\x02\x01UU\x01\x02\x01uu\x01\x02"[..],
        b"\x01II\x01\x02\x03\x04\x01ii\x01\x02\x03\x04\x01ff\x01\x02\x03\x04",
        b"\x01DD\x01\x02\x03\x04\x05\x01Ll12345678\x01ll12345678\x01dd12345678\x01TT12345678",
        b"\x01SS\x00\x00\x00\x01\xff\x01xx\x00\x00\x00\x01\xff",
        b"\x01AA\x00\x00\x00\x03Vt\x01\x01FF\x00\x00\x00\x04\x02\xc3\xbcV",
    ]
    .concat();
    let bytes = [
        frame(CONTENT_HEADER, &properties(&every_type, Some("\u{fc}".as_bytes()))),
        frame(CONTENT_HEADER, &properties(&nested(MAX_DEPTH, b'F'), None)),
        frame(3, &[0xff; 300]),
        frame(8, &[]),
        frame(METHOD, &[0, 10, 0, 10, 0xff, 0xff]),
        frame(METHOD, &[0, 60]),
        frame(CONTENT_HEADER, &[0; 13]),
    ]
    .concat();
    assert_eq!(restored(&bytes), bytes);
    // From a server with another version.
    let other = b"AMQP\x03\x01\x00\x00 and more";
    assert_eq!(restored(other), other);
}

#[test]
fn short_strings_that_are_not_utf8_are_replaced_in_place() {
    let headers = [short_string(b"a\xffb\xc3"), vec![b'S', 0, 0, 0, 1, 0xff]].concat();
    let expected = [short_string(b"a?b?"), vec![b'S', 0, 0, 0, 1, 0xff]].concat();
    let found = repaired(&frame(CONTENT_HEADER, &properties(&headers, Some(b"one"))));
    assert_eq!(found, frame(CONTENT_HEADER, &properties(&expected, Some(b"one"))));

    let deliver = |key: &[u8]| {
        let rest =
            [short_string(b"tag"), vec![0xff; 9], short_string(b""), short_string(key)].concat();
        frame(METHOD, &[vec![0, 60, 0, 60], rest].concat())
    };
    assert_eq!(restored(&deliver(b"\xfe\xff")), deliver(b"??"));
    let returned = |key: &[u8]| {
        let rest =
            [vec![1, 56], short_string(b"NO_ROUTE"), short_string(key), short_string(key)].concat();
        frame(METHOD, &[vec![0, 60, 0, 50], rest].concat())
    };
    assert_eq!(restored(&returned(b"k\xff")), returned(b"k?"));
    for close in [[0, 10, 0, 50], [0, 20, 0, 40]] {
        let closed = |explanation: &[u8]| {
            let rest = [&[1, 148][..], &short_string(explanation), &[0; 4]].concat();
            frame(METHOD, &[&close, &rest[..]].concat())
        };
        assert_eq!(restored(&closed(b"no queue '\xc3...")), closed(b"no queue '?..."));
    }
}

#[test]
fn a_message_id_that_is_not_utf8_is_left_out() {
    let bytes = frame(CONTENT_HEADER, &properties(b"", Some(b"i\xff")));
    assert_eq!(repaired(&bytes), frame(CONTENT_HEADER, &properties(b"", None)));
}

#[test]
fn tables_and_arrays_that_are_nested_too_deep_become_byte_arrays() {
    for kind in *b"FA" {
        for depth in [MAX_DEPTH + 1, MAX_DEPTH + 2, 10_000] {
            let bytes = frame(CONTENT_HEADER, &properties(&nested(depth, kind), None));
            assert_eq!(restored(&bytes), bytes);
            let found = repaired(&bytes);
            assert_eq!(found.len(), bytes.len());
            let changed: Vec<_> = (0..bytes.len()).filter(|at| bytes[*at] != found[*at]).collect();
            assert_eq!(changed.len(), 1, "{kind} {depth}");
            assert_eq!((bytes[changed[0]], found[changed[0]]), (kind, b'x'));
        }
    }
}

#[test]
fn headers_are_left_out_if_the_frame_is_too_large() {
    let headers = [short_string(b"h"), vec![b'x', 0, 0, 0x10, 0], vec![0xff; 0x1000]].concat();
    let large = frame(CONTENT_HEADER, &properties(&headers, Some(b"one")));
    let mut small = properties(b"", Some(b"one"));
    small[FLAGS_AT] = 0;
    small.drain(PROPERTIES_AT..PROPERTIES_AT + 4);
    let small = frame(CONTENT_HEADER, &small);
    let tune = |frame_max: usize| {
        let frame_max = u32::try_from(frame_max).unwrap().to_be_bytes();
        frame(METHOD, &[&[0, 10, 0, 30, 0, 9][..], &frame_max, &[0, 9]].concat())
    };
    for (client, server, is_large) in [
        (Some(0), large.len(), true),
        (Some(0), large.len() + wrapped::OVERHEAD - 1, true),
        (Some(0), large.len() - 1, false),
        (Some(large.len() - 1), 0, false),
        (Some(large.len() - 1), large.len(), false),
        (Some(1), 1, false),
    ] {
        let mut frames = FrameRepair::new(client.map(|size| u32::try_from(size).unwrap()));
        let mut found = Vec::new();
        frames.repair(&[tune(server), large.clone()].concat(), &mut found).unwrap();
        let expected = if is_large { &large } else { &small };
        assert_eq!(found, [&tune(server), &expected[..]].concat(), "{client:?} {server}");
    }
    for frame_max in [0, large.len() + wrapped::OVERHEAD] {
        let (mut found, mut restored) = (Vec::new(), Vec::new());
        let frame_max = u32::try_from(frame_max).unwrap();
        FrameRepair::new(Some(frame_max)).repair(&large, &mut found).unwrap();
        assert_eq!(found.len(), large.len() + wrapped::OVERHEAD, "they are wrapped");
        FrameRestore::new().restore(&found, &mut restored).unwrap();
        assert_eq!(restored, large);
    }
    // Both a message id and headers.
    let both = frame(CONTENT_HEADER, &properties(&headers, Some(b"\xff")));
    let mut found = Vec::new();
    FrameRepair::new(Some(1)).repair(&both, &mut found).unwrap();
    let mut neither = properties(b"", None);
    neither[FLAGS_AT] = 0;
    neither.truncate(PROPERTIES_AT);
    assert_eq!(found, frame(CONTENT_HEADER, &neither));
}

#[test]
fn properties_that_cannot_be_parsed_are_left_out() {
    let mut empty = properties(b"", None);
    empty[FLAGS_AT] = 0;
    empty.truncate(PROPERTIES_AT);
    for headers in [&b"\x01h?"[..], b"\x01hA\x00\x00\x00\x01I", b"\x01hF\x00\x00\x00\x05", b"\x09h"]
    {
        let bytes = frame(CONTENT_HEADER, &properties(headers, Some(b"one")));
        assert_eq!(restored(&bytes), bytes);
        assert_eq!(repaired(&bytes), frame(CONTENT_HEADER, &empty), "{headers:?}");
    }
}

#[test]
fn the_first_byte_of_another_version_counts_only_before_the_first_frame() {
    let bytes = [frame(8, &[]), frame(GREETING, &[])].concat();
    let next = frame(METHOD, &[&[0, 10, 0, 50, 0, 0][..], &short_string(b"\xff")].concat());
    let mut found = Vec::new();
    FrameRepair::new(None).repair(&[bytes.clone(), next].concat(), &mut found).unwrap();
    assert!(found.ends_with(b"?\xce"), "the frames that follow are repaired");
    // A client's greeting, before a content header.
    let wrapped = wrapped::wrap(&[0, 0]);
    let next = |encoded: &[u8]| frame(CONTENT_HEADER, &[&[0; FLAGS_AT], encoded].concat());
    let (mut found, greeting) = (Vec::new(), b"AMQP\0\0\x09\x01");
    let bytes = [&greeting[..], &next(&wrapped)].concat();
    FrameRestore::new().restore(&bytes, &mut found).unwrap();
    assert_eq!(found, [&greeting[..], &next(&[0, 0])].concat());
}

#[test]
fn properties_that_look_wrapped_are_what_they_were() {
    let mut bytes = frame(CONTENT_HEADER, &properties(b"", None));
    for _ in 0..3 {
        let mut found = Vec::new();
        let encoded = wrapped::wrap(&bytes[HEADER + FLAGS_AT..bytes.len() - 1]);
        append_content_header(&bytes, &encoded, &mut found);
        bytes = found;
        assert_eq!(restored(&bytes), bytes);
    }
}

#[test]
fn a_frame_over_the_limit_is_an_error_after_those_before_it() {
    let (first, mut found) = (frame(METHOD, &[0; 4]), Vec::new());
    let bytes = [&first[..], &[CONTENT_HEADER, 0, 1, 0xff, 0xff, 0xff, 0xff]].concat();
    let error = FrameRepair::new(None).repair(&bytes, &mut found).unwrap_err();
    assert_eq!(found, first);
    assert_eq!(error.kind(), io::ErrorKind::InvalidData);
}

#[test]
fn no_bytes_panic() {
    let whole = frame(CONTENT_HEADER, &properties(&nested(40, b'F'), Some(b"\xff")));
    for at in 0..whole.len() {
        for value in [0, 1, 0x7f, 0xff] {
            let mut bytes = whole.clone();
            bytes[at] = value;
            let mut frames = FrameRepair::new(None);
            let _ = frames.repair(&bytes, &mut Vec::new());
            let _ = frames.repair(&bytes, &mut Vec::new());
        }
    }
}
