import java.io.BufferedReader;
import java.io.ByteArrayOutputStream;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.lang.reflect.InvocationTargetException;
import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import org.apache.kafka.common.utils.Exit;

/**
 * Runs command line tools of Kafka in this process. Each line of the input is a main class and its
 * arguments, separated by tabs; the answer is "EXIT code", the output, and a line "END".
 */
public class RunTools {
    static class Exited extends RuntimeException {
        Exited(int code) {
            super("exit " + code, null, false, false);
        }
    }

    private static Integer exitCode;

    /** The first code counts: some tools catch the exception and exit again. */
    private static void exit(int code) {
        exitCode = exitCode == null ? code : exitCode;
        throw new Exited(code);
    }

    public static void main(String[] arguments) throws Exception {
        Exit.setExitProcedure((code, message) -> exit(code));
        Exit.setHaltProcedure((code, message) -> exit(code));
        PrintStream answers = System.out;
        BufferedReader input = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = input.readLine(); line != null; line = input.readLine()) {
            String[] words = line.split("\t");
            ByteArrayOutputStream output = new ByteArrayOutputStream();
            PrintStream stream = new PrintStream(output, true);
            System.setOut(stream);
            System.setErr(stream);
            exitCode = null;
            try {
                Class.forName(words[0])
                        .getMethod("main", String[].class)
                        .invoke(null, (Object) Arrays.copyOfRange(words, 1, words.length));
            } catch (InvocationTargetException failed) {
                if (exitCode == null) {
                    exitCode = 99;
                    failed.getCause().printStackTrace(stream);
                }
            }
            answers.println("EXIT " + (exitCode == null ? 0 : exitCode));
            answers.println(output.toString(StandardCharsets.UTF_8));
            answers.println("END");
            answers.flush();
        }
    }
}
