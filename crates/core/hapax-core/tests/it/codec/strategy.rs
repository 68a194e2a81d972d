use std::time::Duration;

use bytes::Bytes;
use hapax_core::{
    Extensions, Fingerprint, FingerprintScheme, LeaseId, Notes, OnUnknown, Outcome, Record,
    RecordState, Terms,
};
use proptest::prelude::*;

/// A record with a value in every field.
pub(super) fn sample() -> Record {
    Record {
        scheme: FingerprintScheme::new("http/1;body=canonical").unwrap(),
        fingerprint: Fingerprint::from_bytes([0xf1; 32]),
        lease_id: LeaseId::from_bytes([0xa1; 16]),
        generation: LeaseId::from_bytes([0xa0; 16]),
        attempt: 3,
        terms: Terms {
            lease: Duration::from_secs(30),
            retention: Duration::from_secs(86_400),
            on_unknown: OnUnknown::Block,
        },
        checkpoint: Some(Bytes::from_static(b"half way")),
        notes: Notes {
            description: Some(Bytes::from_static(b"POST /payments")),
            decision: Some(Bytes::from_static(b"released")),
        },
        extensions: Extensions::default(),
        state: RecordState::Done(Outcome::new("http/1", b"201 created".as_slice())),
    }
}

pub(super) fn record() -> impl Strategy<Value = Record> {
    let ids = (any::<[u8; 16]>(), any::<[u8; 16]>(), any::<[u8; 32]>(), any::<u32>());
    let terms = (duration(), duration(), on_unknown())
        .prop_map(|(lease, retention, on_unknown)| Terms { lease, retention, on_unknown });
    let notes = (prop::option::of(blob()), prop::option::of(blob()))
        .prop_map(|(description, decision)| Notes { description, decision });
    (ids, terms, "\\PC{0,40}", prop::option::of(blob()), notes, extensions(), state()).prop_map(
        |(
            (lease_id, generation, fingerprint, attempt),
            terms,
            scheme,
            checkpoint,
            notes,
            extensions,
            state,
        )| Record {
            scheme: FingerprintScheme::new(scheme).unwrap(),
            fingerprint: Fingerprint::from_bytes(fingerprint),
            lease_id: LeaseId::from_bytes(lease_id),
            generation: LeaseId::from_bytes(generation),
            attempt,
            terms,
            checkpoint,
            notes,
            extensions,
            state,
        },
    )
}

fn extensions() -> impl Strategy<Value = Extensions> {
    prop::collection::vec((any::<u16>(), blob()), 0..4).prop_map(|fields| {
        let mut extensions = Extensions::default();
        fields.into_iter().for_each(|(number, field)| extensions.set(number, Some(field)));
        extensions
    })
}

fn state() -> impl Strategy<Value = RecordState> {
    prop_oneof![
        Just(RecordState::InFlight),
        Just(RecordState::Released),
        outcome().prop_map(RecordState::Done),
        (prop::option::of(outcome()), any::<bool>())
            .prop_map(|(seen, reconciling)| RecordState::Unknown { seen, reconciling }),
    ]
}

fn outcome() -> impl Strategy<Value = Outcome> {
    ("[a-zé/]{0,20}", blob()).prop_map(|(format, bytes)| Outcome::new(format, bytes))
}

fn blob() -> impl Strategy<Value = Bytes> {
    prop::collection::vec(any::<u8>(), 0..200).prop_map(Bytes::from)
}

fn duration() -> impl Strategy<Value = Duration> {
    prop_oneof![
        Just(Duration::ZERO),
        Just(Duration::MAX),
        (any::<u64>(), 0..1_000_000_000_u32).prop_map(|(secs, nanos)| Duration::new(secs, nanos)),
    ]
}

fn on_unknown() -> impl Strategy<Value = OnUnknown> {
    prop_oneof![Just(OnUnknown::Reexecute), Just(OnUnknown::Reconcile), Just(OnUnknown::Block)]
}
