// Does what an application does with rskafka, which has no groups and creates topics without
// settings. Its argument is a JSON object with bootstrap, topic and, for SASL_SSL, ca (a file), user
// and password. It prints one line for each step.

use std::{collections::BTreeMap, error::Error, sync::Arc, time::Duration};

use chrono::DateTime;
use rskafka::client::partition::{Compression, OffsetAt, UnknownTopicHandling};
use rskafka::client::{Client, ClientBuilder, Credentials, SaslConfig};
use rskafka::record::Record;
use rustls::pki_types::{pem::PemObject, CertificateDer};
use rustls::{ClientConfig, RootCertStore};
use serde_json::Value;

const CODECS: [Compression; 5] = [
    Compression::NoCompression,
    Compression::Gzip,
    Compression::Snappy,
    Compression::Lz4,
    Compression::Zstd,
];
const KEYS: usize = 10;

fn text(options: &Value, name: &str) -> String {
    options[name].as_str().unwrap_or_default().to_owned()
}

async fn connect(options: &Value) -> Result<Client, Box<dyn Error>> {
    let mut builder = ClientBuilder::new(vec![text(options, "bootstrap")]);
    if options.get("ca").is_some() {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(text(options, "ca"))?)?;
        let tls = ClientConfig::builder()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let login = Credentials::new(text(options, "user"), text(options, "password"));
        builder = builder
            .tls_config(Arc::new(tls))
            .sasl_config(SaslConfig::ScramSha512(login));
    }
    Ok(builder.build().await?)
}

fn record(key: usize, value: Option<&str>) -> Record {
    Record {
        key: Some(format!("k{key}").into_bytes()),
        value: value.map(|value| value.as_bytes().to_vec()),
        headers: BTreeMap::from([("origin".to_owned(), b"rskafka".to_vec())]),
        timestamp: DateTime::from_timestamp_millis(1_700_000_000_000).expect("a valid time"),
    }
}

async fn round(options: &Value) -> Result<(), Box<dyn Error>> {
    let client = connect(options).await?;
    let name = text(options, "topic");
    let topics = client.list_topics().await?;
    let topic = topics.iter().find(|topic| topic.name == name);
    println!("partitions {}", topic.map_or(0, |topic| topic.partitions.len()));

    let partition = client
        .partition_client(name, 0, UnknownTopicHandling::Retry)
        .await?;
    for codec in CODECS {
        let value = format!("{codec:?}");
        let records = (0..KEYS).map(|key| record(key, Some(&value))).collect();
        partition.produce(records, codec).await?;
    }
    let tombstone = vec![record(0, None)];
    partition.produce(tombstone, Compression::NoCompression).await?;

    let end = partition.get_offset(OffsetAt::Latest).await?;
    let mut next = partition.get_offset(OffsetAt::Earliest).await?;
    let (mut read, mut headers) = (0, 0);
    while next < end {
        let (records, _) = partition.fetch_records(next, 1..1_000_000, 1_000).await?;
        for fetched in &records {
            read += 1;
            headers += fetched.record.headers.len();
            next = fetched.offset + 1;
        }
    }
    println!("read {read} with {headers} headers to {end}");

    client
        .controller_client()?
        .create_topic(text(options, "created"), 2, 1, 5_000)
        .await?;
    println!("created");
    Ok(())
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let options: Value = serde_json::from_str(&std::env::args().nth(1).expect("an argument"))?;
    tokio::time::timeout(Duration::from_secs(100), round(&options)).await?
}
