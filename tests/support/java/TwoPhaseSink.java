import java.lang.reflect.*;
import java.util.*;
import org.apache.kafka.clients.producer.*;
import org.apache.kafka.common.serialization.*;
import org.apache.kafka.common.utils.ProducerIdAndEpoch;

/**
 * Writes in two phases, as Flink's sink does. Arguments: bootstrap, transactional id, and
 *
 * <ul>
 *   <li>{@code prepare TOPIC RECORDS}: writes records, prints the producer's id and epoch, and ends
 *       without a commit.
 *   <li>{@code commit ID EPOCH}: commits the transaction of that process. As InitProducerId would
 *       abort it, the state of the producer is set by reflection.
 * </ul>
 */
public class TwoPhaseSink {
  public static void main(String[] args) throws Exception {
    Map<String, Object> settings = Map.of(
        "bootstrap.servers", args[0], "transactional.id", args[1], "transaction.timeout.ms", 600000);
    var producer = new KafkaProducer<>(settings, new StringSerializer(), new StringSerializer());
    Object manager = get(producer, "transactionManager");
    if (args[2].equals("prepare")) {
      producer.initTransactions();
      producer.beginTransaction();
      for (int number = 0; number < Integer.parseInt(args[4]); number++) {
        producer.send(new ProducerRecord<>(args[3], "key", "value-" + number));
      }
      producer.flush();
      var current = (ProducerIdAndEpoch) get(manager, "producerIdAndEpoch");
      System.out.println(current.producerId + " " + current.epoch);
      System.out.flush();
      Runtime.getRuntime().halt(0); // close() would abort the transaction
    }
    resume(manager, new ProducerIdAndEpoch(Long.parseLong(args[3]), Short.parseShort(args[4])));
    producer.commitTransaction();
    producer.close();
  }

  private static void resume(Object manager, ProducerIdAndEpoch prepared) throws Exception {
    synchronized (manager) {
      moveTo(manager, "INITIALIZING");
      set(manager, "producerIdAndEpoch", prepared);
      moveTo(manager, "READY");
      moveTo(manager, "IN_TRANSACTION");
      set(manager, "transactionStarted", true);
    }
  }

  private static void moveTo(Object manager, String name) throws Exception {
    Class<?> states = Class.forName(manager.getClass().getName() + "$State");
    for (Object state : states.getEnumConstants()) {
      if (state.toString().equals(name)) {
        Method method = manager.getClass().getDeclaredMethod("transitionTo", states);
        method.setAccessible(true);
        method.invoke(manager, state);
      }
    }
  }

  private static Object get(Object target, String name) throws Exception {
    return field(target, name).get(target);
  }

  private static void set(Object target, String name, Object value) throws Exception {
    field(target, name).set(target, value);
  }

  private static Field field(Object target, String name) throws Exception {
    Field field = target.getClass().getDeclaredField(name);
    field.setAccessible(true);
    return field;
  }
}
