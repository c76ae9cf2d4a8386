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
 * arguments, separated by tabs. The answer is a line with the exit code and the sizes of the output
 * and of the errors in bytes, and then both.
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
            ByteArrayOutputStream errors = new ByteArrayOutputStream();
            System.setOut(new PrintStream(output, true));
            System.setErr(new PrintStream(errors, true));
            exitCode = null;
            try {
                Class.forName(words[0])
                        .getMethod("main", String[].class)
                        .invoke(null, (Object) Arrays.copyOfRange(words, 1, words.length));
            } catch (InvocationTargetException failed) {
                if (exitCode == null) {
                    exitCode = 99;
                    failed.getCause().printStackTrace();
                }
            }
            System.out.flush();
            System.err.flush();
            byte[] outputBytes = output.toByteArray();
            byte[] errorBytes = errors.toByteArray();
            answers.println((exitCode == null ? 0 : exitCode) + " " + outputBytes.length + " " + errorBytes.length);
            answers.write(outputBytes);
            answers.write(errorBytes);
            answers.flush();
        }
    }
}
