// Command peer does what an application does with franz-go. Its argument is a JSON object with
// bootstrap, topic, group and, for SASL_SSL, ca (a file), user and password. It prints one line for
// each step.
package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"log"
	"os"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/sasl/scram"
)

type options struct{ Bootstrap, Topic, Group, CA, User, Password string }

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

func (o options) client(more ...kgo.Opt) *kgo.Client {
	all := append([]kgo.Opt{kgo.SeedBrokers(o.Bootstrap)}, more...)
	if o.CA != "" {
		pem, err := os.ReadFile(o.CA)
		check(err)
		roots := x509.NewCertPool()
		roots.AppendCertsFromPEM(pem)
		auth := scram.Auth{User: o.User, Pass: o.Password}
		all = append(all, kgo.DialTLSConfig(&tls.Config{RootCAs: roots}),
			kgo.SASL(auth.AsSha512Mechanism()))
	}
	client, err := kgo.NewClient(all...)
	check(err)
	return client
}

// consume reads committed records as a group member until count have come; a later member continues.
func (o options) consume(ctx context.Context, count int) int {
	client := o.client(kgo.ConsumerGroup(o.Group), kgo.ConsumeTopics(o.Topic),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()), kgo.DisableAutoCommit(),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()))
	defer client.Close()
	seen := 0
	for seen < count {
		fetches := client.PollRecords(ctx, count-seen)
		check(fetches.Err())
		check(client.CommitRecords(ctx, fetches.Records()...))
		seen += fetches.NumRecords()
	}
	return seen
}

func main() {
	var o options
	check(json.Unmarshal([]byte(os.Args[1]), &o))
	ctx, cancel := context.WithTimeout(context.Background(), 100*time.Second)
	defer cancel()

	plain := o.client()
	defer plain.Close()
	admin, policy := kadm.NewClient(plain), "compact"
	_, err := admin.CreateTopic(ctx, 1, 1, map[string]*string{"cleanup.policy": &policy}, o.Topic)
	check(err)
	details, err := admin.ListTopics(ctx, o.Topic)
	check(err)
	configs, err := admin.DescribeTopicConfigs(ctx, o.Topic)
	check(err)
	for _, config := range configs[0].Configs {
		if config.Key == "cleanup.policy" {
			fmt.Println("described", len(details[o.Topic].Partitions), config.MaybeValue())
		}
	}

	producer := o.client(kgo.TransactionalID(o.Topic),
		kgo.ProducerBatchCompression(kgo.ZstdCompression()))
	for _, value := range []string{"first", "aborted", "last"} {
		check(producer.BeginTransaction())
		for key := 0; key < 10; key++ {
			record := &kgo.Record{Topic: o.Topic, Key: fmt.Appendf(nil, "k%d", key), Value: []byte(value)}
			producer.Produce(ctx, record, func(_ *kgo.Record, err error) { check(err) })
		}
		check(producer.Flush(ctx))
		check(producer.EndTransaction(ctx, kgo.TransactionEndTry(value != "aborted")))
	}
	producer.Close()
	check(plain.ProduceSync(ctx, &kgo.Record{Topic: o.Topic, Key: []byte("k0")}).FirstErr())

	fmt.Println("read", o.consume(ctx, 15))
	fmt.Println("continued", o.consume(ctx, 6))
}
