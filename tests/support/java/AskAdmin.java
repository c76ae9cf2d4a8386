import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Set;
import java.util.TreeMap;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.AlterConfigOp;
import org.apache.kafka.clients.admin.ConfigEntry;
import org.apache.kafka.clients.admin.NewPartitionReassignment;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.admin.TopicDescription;
import org.apache.kafka.common.ElectionType;
import org.apache.kafka.common.TopicCollection;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.Uuid;
import org.apache.kafka.common.config.ConfigResource;

/** Calls of Kafka's Admin client that concern one node or a whole cluster; a line for each answer. */
public class AskAdmin {
    public static void main(String[] arguments) throws Exception {
        String topic = arguments[1];
        TopicPartition partition = new TopicPartition(topic, 0);
        try (Admin admin = Admin.create(Map.of("bootstrap.servers", arguments[0]))) {
            admin.createTopics(List.of(new NewTopic(topic, 2, (short) 1))).all().get();
            Uuid id = admin.describeTopics(List.of(topic)).allTopicNames().get().get(topic).topicId();
            TopicDescription byId =
                    admin.describeTopics(TopicCollection.ofTopicIds(List.of(id))).allTopicIds().get().get(id);
            say("described by id", byId.name() + " " + byId.partitions().size());
            say("resources", new TreeMap<>(Map.of(topic, admin.listConfigResources().all().get().stream()
                    .anyMatch(resource -> resource.name().equals(topic)))));
            say("leader of the quorum", admin.describeMetadataQuorum().quorumInfo().get().leaderId());
            say("producers", admin.describeProducers(List.of(partition)).all().get()
                    .get(partition).activeProducers().size());
            say("reassignments", admin.listPartitionReassignments().reassignments().get());
            say("elections", admin.electLeaders(ElectionType.PREFERRED, null).partitions().get());
            say("election", admin.electLeaders(ElectionType.PREFERRED, Set.of(partition)).partitions().get()
                    .get(partition).get().getClass().getSimpleName());
            int node = byId.partitions().get(0).leader().id();
            admin.alterPartitionReassignments(
                    Map.of(partition, Optional.of(new NewPartitionReassignment(List.of(node))))).all().get();
            say("reassigned to", node);
            ConfigResource broker = new ConfigResource(ConfigResource.Type.BROKER, String.valueOf(node));
            for (String[] change : new String[][] {
                    {"max.connections", "77"}, {"max.connections.per.ip", "66"}, {"producer.id.expiration.ms", "55000"}}) {
                AlterConfigOp set = new AlterConfigOp(new ConfigEntry(change[0], change[1]), AlterConfigOp.OpType.SET);
                admin.incrementalAlterConfigs(Map.of(broker, List.of(set))).all().get();
                ConfigEntry entry = admin.describeConfigs(List.of(broker)).all().get().get(broker).get(change[0]);
                say(change[0], entry.value() + " " + entry.source() + " read only: " + entry.isReadOnly());
            }
        }
    }

    private static void say(String what, Object answer) {
        System.out.println(what + ": " + answer);
    }
}
